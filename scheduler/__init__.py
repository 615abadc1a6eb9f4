"""From models and requests to programs and steps."""
