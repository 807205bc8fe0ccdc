"""The GPU: the driver, torch's allocator, streams and meters."""
