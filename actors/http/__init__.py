"""The HTTP server: OpenAI's and Anthropic's forms of requests in, answers and their figures out."""
