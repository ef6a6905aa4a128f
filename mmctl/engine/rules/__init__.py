"""The expression language over signals, live and on columns. The rules themselves: profiles."""
