#!/usr/bin/env bash
# For a GPU machine that has torch but no network: unpacks, into two git-ignored folders to take along, what the tests
# need beside torch (.testtools) and what the peers of the benchmarks are (.peers).
# Usage: benchmarks/offline.sh [PYTHON_VERSION]      (of that machine, x86-64; default 3.12)
# There: PYTHONPATH=.testtools benchmarks/gpu.sh OUTPUT_FOLDER; benchmarks.training, .activations and .models find .peers by themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
pip="python3 -m pip --quiet --disable-pip-version-check"
there="--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --python-version $version --only-binary :all:"

rm -rf .testtools .peers
$pip install --no-compile --target .testtools $there --no-deps \
  pytest pytest-timeout pytest-xdist execnet pluggy iniconfig packaging pygments hypothesis sortedcontainers

$pip install --no-compile --target .peers $there hjson einops msgpack ninja py-cpuinfo pydantic
$pip install --no-compile --target .peers $there --no-deps ramtorch==1.11.0 trl==1.16.0 # theirs would bring another torch
# Of diffusers, the models alone: pipelines are most of it. What it asks for beside them comes without the Hub's client.
$pip install --no-compile --target .peers $there --no-deps \
  diffusers==0.42.1 requests urllib3 idna certifi charset-normalizer importlib_metadata zipp
rm -rf .peers/diffusers/modular_pipelines .peers/diffusers/pipelines/*/
# DeepSpeed is published as source alone. Its Python part is all that is needed: it compiles what it uses.
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
$pip download --no-deps --no-binary deepspeed -d "$sources" deepspeed==0.19.8
tar -xzf "$sources"/deepspeed-0.19.8.tar.gz -C "$sources"
cp -r "$sources"/deepspeed-0.19.8/deepspeed .peers/
# Its access to files is compiled against libaio, the static library: that machine then needs none of its own.
if (cd "$sources" && apt-get -qq download libaio-dev:amd64 && dpkg-deb -x libaio-dev_*.deb libaio); then
  mkdir -p .peers/libaio
  cp "$sources"/libaio/usr/include/libaio.h "$sources"/libaio/usr/lib/x86_64-linux-gnu/libaio.a .peers/libaio/
else
  echo "no libaio-dev of x86-64 from apt-get: the cases of benchmarks.disk with DeepSpeed need it on that machine" >&2
fi
rm -rf .testtools/bin
du -sh .testtools .peers
