"""Tool calling: the tools of a request, and the calls in what the model writes."""
