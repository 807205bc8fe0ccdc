"""Files: aligned requests, many at a time, within one folder."""
