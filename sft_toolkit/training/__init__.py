"""What SFTTrainer is made of: a base class or a callback for each concern, and what it takes in."""
