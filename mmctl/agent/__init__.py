"""What lives inside a serving process: tensor tracker, pool publisher, command socket."""
