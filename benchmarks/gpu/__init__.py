"""What a GPU shows of this program: ``make gpu``."""
