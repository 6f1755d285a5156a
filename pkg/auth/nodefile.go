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

// WriteNodeFile writes a node's certificate chain (PEM) and its key into one file with mode 0600.
// It replaces the file atomically.
//
// An existing file keeps its owner. If path is a symbolic link, the target of the link is replaced.
//
// If the folder belongs to another user, or everybody may write to it, other users could have put
// any file or link there. In such a folder WriteNodeFile replaces a link itself, not its target.
// If root runs WriteNodeFile there, the owner of the folder gets the new file.
func WriteNodeFile(path string, chainPEM []byte, key crypto.Signer) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the node's key: %w", err)
	}
	keyPEM := encodePEM("PRIVATE KEY", der)
	if _, err = tls.X509KeyPair(chainPEM, keyPEM); err != nil {
		return fmt.Errorf("the node's certificate and key: %w", err)
	}
	if err = WriteSecretFile(path, append(chainPEM[:len(chainPEM):len(chainPEM)], keyPEM...)); err != nil {
		return fmt.Errorf("writing the node's certificate and key: %w", err)
	}
	return nil
}

// WriteSecretFile replaces a file with a secret, in the same way as WriteNodeFile.
func WriteSecretFile(path string, content []byte) error {
	path, reference, err := followLinks(path)
	if err != nil {
		return err
	}
	return replaceSecret(path, reference, content)
}

// maxLinks is how many symbolic links followLinks follows at most, as in Linux (path_resolution(7)).
const maxLinks = 40

// followLinks returns the path of the file to replace. The new file gets the owner of reference, a
// file or folder; nil: our own user. followLinks follows a link only if no other users than root
// and our own user can have made the link.
func followLinks(path string) (to string, reference fs.FileInfo, err error) {
	for range maxLinks {
		folder, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", nil, err
		}
		dir, err := os.Lstat(folder)
		if err != nil {
			return "", nil, err
		}
		path = filepath.Join(folder, filepath.Base(path))
		if uid, _, ok := FileOwner(dir); ok && uid != os.Geteuid() && uid != 0 || dir.Mode()&0o002 != 0 {
			if os.Geteuid() != 0 { // only root can give files away
				dir = nil
			}
			return path, dir, nil
		}
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return path, nil, nil
		case err != nil:
			return "", nil, err
		case info.Mode()&fs.ModeSymlink == 0:
			return path, info, nil
		}
		next, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(next) {
			next = filepath.Join(filepath.Dir(path), next)
		}
		path = next
	}
	return "", nil, syscall.ELOOP
}

// replaceSecret writes a temporary file beside path, with mode 0600, and renames it over path.
func replaceSecret(path string, reference fs.FileInfo, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name()) //nolint:errcheck // the returned error says more
		}
	}()
	if err := sameOwner(f, reference); err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	// Without fsync, a power loss after the rename could leave an empty file.
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return SyncFolder(filepath.Dir(path))
}

// sameOwner sets the owner and the group of f to those of reference; nil: f stays as it is. It changes
// nothing if the owner is our own user already.
func sameOwner(f *os.File, reference fs.FileInfo) error {
	if reference == nil {
		return nil
	}
	uid, gid, ok := FileOwner(reference)
	if !ok || uid == os.Geteuid() && (gid == os.Getegid() || reference.IsDir()) {
		return nil
	}
	return f.Chown(uid, gid)
}
