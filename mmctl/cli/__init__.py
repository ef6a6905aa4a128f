"""What a person types: parsing and rendering, no logic. ``commands.py`` is the whole tree."""
