"""What is answered under `/api/v1`, one module for each thing that is asked about."""
