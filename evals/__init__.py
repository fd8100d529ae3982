"""Questions, prompts and loads for both servers, the parsing of answers, and the tiny model that can answer."""
