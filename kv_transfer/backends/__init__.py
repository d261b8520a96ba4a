"""How bytes travel between two ranks. One contract (base), one contract suite, several backends."""
