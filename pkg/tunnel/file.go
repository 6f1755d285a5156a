package tunnel

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// MaxFile is the limit that suits ReadFile for a file with certificates or keys, in bytes. A system's bundle of all
// public authorities is about a quarter of that.
const MaxFile = 1 << 20

// ReadFile returns the content of a regular file of at most limit bytes, and its FileInfo. It never waits: for a
// named pipe, a device or any other file that is not regular, it returns an error at once. Commands of root read files
// by it that belong to the account of a daemon: that account may put anything in their place.
func ReadFile(path string, limit int64) ([]byte, fs.FileInfo, error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer. Windows ignores the flag.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file", path)
	}
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, nil, err
	}
	if int64(len(content)) > limit {
		return nil, nil, fmt.Errorf("%s is longer than %d bytes", path, limit)
	}
	return content, info, nil
}
