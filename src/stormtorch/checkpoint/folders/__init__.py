"""Folders of checkpoints: manifests, complete ones, and what dead processes left."""
