"""What a person watches: Textual screens and widgets, no logic. One file per screen."""
