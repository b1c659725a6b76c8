"""What several tests use: engines, models and programs that stand in for real ones, and how to read what they leave."""
