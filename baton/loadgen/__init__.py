"""The load generator behind `baton bench`: plans requests, sends them, measures what clients see.

    traces, arrivals → workload   what to send and when (plain Python)
    client → runner               one streamed request; all of them
    metrics, sweep                figures as vLLM's `bench serve` defines them; where the knee is

Speaks to any OpenAI-compatible server and knows nothing of Baton's insides.
"""
