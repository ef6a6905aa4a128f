"""A URI → an iterator of records; one file per kind of source."""
