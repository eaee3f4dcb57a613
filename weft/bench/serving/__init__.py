"""Command `weft bench serve`: requests to any server with OpenAI's API, timed at the client."""
