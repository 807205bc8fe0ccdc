"""Memory that is taken once and handed out again and again."""
