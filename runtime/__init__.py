"""What serves a plan: stages in worker processes, the orchestrator that owns requests, the HTTP server."""
