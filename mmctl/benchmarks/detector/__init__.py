"""A small detector of coming memory conflicts: learned from recordings, exported, served."""
