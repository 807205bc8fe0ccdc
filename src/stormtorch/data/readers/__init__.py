"""The order of rows, and how they are read: from the page cache, or in prefetched windows."""
