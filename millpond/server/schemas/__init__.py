"""Wire types of requests, in pydantic: the only place where it is used."""
