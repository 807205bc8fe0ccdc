"""Which rows come when, and how they are read: from the page cache, or in windows read ahead."""
