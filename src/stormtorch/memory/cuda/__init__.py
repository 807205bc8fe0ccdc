"""The GPU: the driver, torch's allocator, and what can be measured of them."""
