"""The workers a router knows, and the choice among them."""
