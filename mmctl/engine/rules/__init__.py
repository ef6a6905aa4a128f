"""The expression language over signals, live and on columns."""
