"""RAM: mapped once, page-locked, handed out in pieces."""
