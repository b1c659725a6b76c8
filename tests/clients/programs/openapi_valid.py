"""Validates what a server says of itself, as OpenAPI. Prints the number of its paths."""

import json
import sys
from urllib import request

from openapi_spec_validator import validate

with request.urlopen(f"{sys.argv[1]}/openapi.json") as answer:
    found = json.load(answer)
validate(found)
print(len(found["paths"]))
