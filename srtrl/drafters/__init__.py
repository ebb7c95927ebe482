"""Draft trees and the drafters that propose them, one file a drafter."""
