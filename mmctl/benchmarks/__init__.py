"""What ``mmctl benchmark`` runs: it measures, fits and compares."""
