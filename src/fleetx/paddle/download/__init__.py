"""Download data sets: a yaml names a remote folder, whose filelist.txt and meta.txt list the files.

downloader   the public calls and their arguments
config       the yaml: where the folder is
listing      filelist.txt, meta.txt, shards, names that must stay inside the folder
remote       files of a remote folder: http(s) with urllib, everything else with fsspec
fetch        one file: resumed, retried, its md5 checked
unpack       one tar: into a temporary folder, then renamed into place
folder       all files, in threads
node         one process per node does the work, the others wait for its outcome; records in the local folder
progress     a bar, or a line from time to time
"""
