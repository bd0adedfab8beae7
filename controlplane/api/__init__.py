"""REST API v1: parse, ask a service or a selector, answer. No rule of the business lives here."""
