"""Threads that read pieces of files and copy memory for the data loader, in C or in Python."""
