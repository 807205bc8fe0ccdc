"""A session: the public calls, and how its parts are opened, used and closed."""
