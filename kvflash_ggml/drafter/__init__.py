"""A second, smaller model beside the one that answers."""
