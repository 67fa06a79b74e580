"""vLLM adapter: engines, weight receive, chat tokens, tool-call parsing, flows, rollout workers."""
