"""What becomes of each block, as data, and the measurements and the room that it is chosen from."""
