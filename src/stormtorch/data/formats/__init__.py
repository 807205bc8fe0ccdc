"""What files hold: one module for each format, and open.py, which recognises them."""
