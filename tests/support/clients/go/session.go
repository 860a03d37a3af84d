// One connection and its operations.

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/go-sql-driver/mysql"
)

// session is one connection. With interpolate, queries with parameters use the text protocol.
type session struct {
	*sql.Conn
	pool *sql.DB
}

func (p plan) open(interpolate bool, change func(*mysql.Config)) (session, error) {
	config := p.base.Clone()
	config.InterpolateParams = interpolate
	if change != nil {
		change(config)
	}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return session{}, err
	}
	pool := sql.OpenDB(connector)
	conn, err := pool.Conn(context.Background())
	if err != nil {
		pool.Close()
		return session{}, err
	}
	return session{conn, pool}, nil
}

func (s session) close() {
	s.Conn.Close()
	s.pool.Close()
}

func (s session) exec(query string, parameters ...any) error {
	_, err := s.ExecContext(context.Background(), query, parameters...)
	return err
}

func (s session) number(query string, parameters ...any) (int64, error) {
	var number int64
	err := s.QueryRowContext(context.Background(), query, parameters...).Scan(&number)
	return number, err
}

func (s session) expect(wanted int64, query string, parameters ...any) error {
	got, err := s.number(query, parameters...)
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	if got != wanted {
		return fmt.Errorf("%s: %d, not %d", query, got, wanted)
	}
	return nil
}

// first runs the actions until one fails, and returns its error.
func first(actions ...func() error) error {
	for _, action := range actions {
		if err := action(); err != nil {
			return err
		}
	}
	return nil
}

func wantError(err error, code uint16) (string, error) {
	var answer *mysql.MySQLError
	if errors.As(err, &answer) && answer.Number == code {
		return fmt.Sprintf("error %d", code), nil
	}
	return "", fmt.Errorf("wanted error %d, got %v", code, err)
}
