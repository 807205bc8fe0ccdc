"""``storm data pack``: documents and arrays become packed folders."""
