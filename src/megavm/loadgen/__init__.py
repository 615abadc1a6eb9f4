"""A load generator for OpenAI-compatible servers: `megavm bench serve`.

`workload` draws prompts and lengths, `client` sends one request and times its stream, `run` sends
many requests on a schedule, `report` turns their outcomes into statistics. The package depends
neither on megavm's server nor on torch.
"""
