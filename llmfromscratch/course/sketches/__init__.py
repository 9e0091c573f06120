"""Code that only teaches: first versions that a chapter then replaces, and things the engine leaves to a library."""
