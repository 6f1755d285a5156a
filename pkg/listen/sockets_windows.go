package listen

import (
	"errors"
	"os"
	"syscall"
)

// duplicate fails: on Windows, no process can take over sockets.
func duplicate(syscall.Conn) (*os.File, error) { return nil, errors.ErrUnsupported }
