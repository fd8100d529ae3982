"""Questions, prompts and loads for both servers, how answers are parsed, and the tiny model that can answer."""
