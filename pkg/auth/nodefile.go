package auth

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// WriteNodeFile writes a node's certificate, its chain in PEM, and its key into one file
// that its owner alone can read, at once or not at all. A file that is there keeps its
// owner; where the path is a symbolic link, what it leads to is replaced.
func WriteNodeFile(path string, chainPEM []byte, key crypto.Signer) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the node's key: %w", err)
	}
	keyPEM := encodePEM("PRIVATE KEY", der)
	if _, err := tls.X509KeyPair(chainPEM, keyPEM); err != nil {
		return fmt.Errorf("the node's certificate and key: %w", err)
	}
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to
	}
	if err := replaceSecret(path, append(chainPEM[:len(chainPEM):len(chainPEM)], keyPEM...)); err != nil {
		return fmt.Errorf("writing the node's certificate and key: %w", err)
	}
	return nil
}

// replaceSecret writes a file beside path and puts it in its place.
func replaceSecret(path string, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name()) //nolint:errcheck // the error that is returned says more
		}
	}()
	if err := sameOwner(f, path); err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	// A machine that loses its power now must not come back with an empty file.
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// sameOwner gives f to the owner of the file at path, if there is one.
func sameOwner(f *os.File, path string) error {
	old, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	was, ok := old.Sys().(*syscall.Stat_t)
	if !ok || int(was.Uid) == os.Geteuid() && int(was.Gid) == os.Getegid() {
		return nil
	}
	return f.Chown(int(was.Uid), int(was.Gid))
}
