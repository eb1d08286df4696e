"""Plans which rank writes which bytes of which file, once before the first save."""
