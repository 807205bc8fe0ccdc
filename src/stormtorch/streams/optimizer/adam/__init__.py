"""Our own Adam: its updates on the CPU and on the device, and where its states lie."""
