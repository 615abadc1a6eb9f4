"""Load on an OpenAI-compatible server, and what it measures: `megavm bench serve`.

`workload` draws prompts and lengths, `client` sends one request and times its stream, `run` sends
many by a schedule, `report` turns their outcomes into statistics. Nothing here knows megavm's own
server or needs torch.
"""
