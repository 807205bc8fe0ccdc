"""Files of checkpoints: system calls that can fail, checksums, safetensors, threads that read and write."""
