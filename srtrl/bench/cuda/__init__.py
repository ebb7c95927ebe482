"""What `srtrl bench gpu` does: is the CUDA path right, and how fast is it?"""
