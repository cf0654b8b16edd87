"""Tools of the maintainers: not part of the wheel."""
