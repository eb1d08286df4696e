"""Who writes which bytes of which file: planned once, before the first save."""
